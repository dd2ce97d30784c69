"""Mathematical answers in LaTeX: extracted from a text, normalized, compared."""
