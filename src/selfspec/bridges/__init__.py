"""Our known-token drafts in other engines. A bridge imports its engine when it is constructed, and no torch."""
