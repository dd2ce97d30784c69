"""Language models trained on their own judged answers: the batch, the algorithms, the loop."""
