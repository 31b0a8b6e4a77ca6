"""Expressions with equal results and different speed, for gradient rules and for passes that choose again."""
