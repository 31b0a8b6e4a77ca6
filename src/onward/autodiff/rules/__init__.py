"""One gradient rule per operator, registered when its module is imported. Begin with `elementwise`."""
