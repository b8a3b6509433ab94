"""Training objectives, one per file, registered in `configs.recipe.OBJECTIVES`."""
