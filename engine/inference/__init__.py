"""Uses a trained model: predict, evaluate, export."""
