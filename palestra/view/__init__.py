"""The web view: a local page over run folders, live while runs go on; never imports torch."""
