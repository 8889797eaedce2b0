"""Does what a plan says: the rewriter, and the drop-in for any training loop."""
