"""Input pipelines: batches on a device, from images in memory or streamed by DataLoader workers."""
