"""One file per claim. Each prints ratios against a peer or a limit that it measured in the same run."""
