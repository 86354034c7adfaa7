# (the install rules follow with the packaging commit)
