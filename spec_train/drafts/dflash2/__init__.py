"""DFlash 2: DFlash with convolutions inside a block and a selector."""
