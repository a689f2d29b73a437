"""Input pipelines: batches on a device, from images in memory or streamed by decode threads or DataLoader workers."""
