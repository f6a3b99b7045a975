"""A tiny model that cannot compute learns, from rewards alone, to ask a calculator, on two CPU cores."""
