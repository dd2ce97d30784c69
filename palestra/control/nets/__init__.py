"""Networks for control: trunks, action heads, actor-critics, values."""
