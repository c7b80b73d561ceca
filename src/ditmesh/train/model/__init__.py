"""What a run adds to the model: adapters, frozen weights, dropout, compiled blocks, a part of the tokens."""
