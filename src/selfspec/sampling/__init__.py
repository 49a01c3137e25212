"""How tokens are chosen and drafts accepted: pure functions of scores and random numbers."""
