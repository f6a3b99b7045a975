"""What a model needs before there is any: parameters, memory and time, as functions of its shape and of a layout."""
