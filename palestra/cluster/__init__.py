"""Past one process: where objects and work are placed, how they are called, and how weights reach them."""
