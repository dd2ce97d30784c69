"""`python -m palestra`, as `torchrun -m palestra` starts it."""

from palestra.cli import main

if __name__ == "__main__":
    main()
