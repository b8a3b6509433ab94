"""HTML pages: one stylesheet, figures as inline SVG, everything in one file that opens from disk."""
