"""The bias lab: what each architecture assumes of images, measured on the user's own."""
