"""The NumPy functions that training on a CPU needs faster than ``entrenar.reference`` states them."""
