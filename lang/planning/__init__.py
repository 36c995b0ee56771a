"""What a program will do, found without a model, and what that says of many runs of it."""
