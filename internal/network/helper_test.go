package network

func helper() int { return 0 }
