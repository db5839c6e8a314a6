"""Products of a few rows with a weight matrix, fused with the norm, activation and residual add around them."""
