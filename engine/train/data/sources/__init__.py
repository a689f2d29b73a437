"""Sources of images and labels: built-in datasets, image folders and user datasets."""
