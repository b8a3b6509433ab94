"""Training objectives, one per file, registered in `training.recipe.OBJECTIVES`."""
