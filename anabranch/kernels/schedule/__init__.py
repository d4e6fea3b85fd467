"""Who attends to what: schedules written on the device, and how kernels walk through them."""
