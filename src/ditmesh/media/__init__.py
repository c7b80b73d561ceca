"""Images and videos of others as a person sees them: one reader for training, generation, the server and clients."""
