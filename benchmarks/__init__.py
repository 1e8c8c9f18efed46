"""One file per claim. Each prints ratios to a peer or a limit measured in the same run."""
