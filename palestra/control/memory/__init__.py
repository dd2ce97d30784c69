"""What off-policy algorithms learn from again: transitions in a ring, and the tree that draws by priority."""
