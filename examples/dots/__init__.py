"""Questions about pictures: a tiny model of images and text learns from rewards alone to see."""
