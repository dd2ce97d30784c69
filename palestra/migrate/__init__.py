"""Specs of other frameworks as ours."""
