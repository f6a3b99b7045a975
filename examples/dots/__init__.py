"""Answering about pictures: a tiny model of images and text learns to see from rewards alone."""
