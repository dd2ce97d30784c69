"""Generation: the engine, its server, and clients with one interface."""
