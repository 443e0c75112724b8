"""fxpipe in the training loops of other libraries; each module is imported only when asked for."""
