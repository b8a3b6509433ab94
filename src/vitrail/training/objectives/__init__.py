"""What a model can be trained to do: one file for each objective, registered in `configs.recipe.OBJECTIVES`."""
