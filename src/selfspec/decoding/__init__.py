"""The round: drafting, verification, acceptance."""
