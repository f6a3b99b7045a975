"""A tiny model that cannot compute learns, from rewards alone, to call a calculator, on two CPU cores."""
