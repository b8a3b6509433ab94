"""Pages for people: one stylesheet, plain HTML, figures as inline SVG. Everything in one file that works from disk."""
