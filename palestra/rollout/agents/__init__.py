"""Agents: programs of the user that talk to the model through the gateway, and the workflow that runs them."""
