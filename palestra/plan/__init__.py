"""What a spec costs before it runs: memory, layout, split, time and money on any number of devices."""
