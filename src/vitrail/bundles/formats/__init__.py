"""Weight formats of other libraries."""
