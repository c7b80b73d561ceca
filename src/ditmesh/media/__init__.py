"""One reader of image and video files for training, generation, the server and clients."""
