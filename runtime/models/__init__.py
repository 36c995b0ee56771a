"""Model code: the forward pass over a ForwardBatch."""
