"""Running a trained model: engines, precisions, export."""
