"""Methods for comparison, which ``selfspec`` finds by the entry points of this package."""
