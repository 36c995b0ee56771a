"""Where what was decided meets what computes: a plan becomes tensors, logits become tokens."""
