"""`onward mobile`: projects for Android and iOS that train on the device, over the stock runtime."""
