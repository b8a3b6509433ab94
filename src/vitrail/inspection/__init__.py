"""Looking inside a model. The modules here measure: arrays in, arrays out. `panels` shows the results on one page."""
