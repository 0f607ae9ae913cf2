"""What a backend is tested with: a float64 reference, and random problems to compare it on."""
