// IcePop: the same quotient weighs each token, and those where it lies outside have no policy term
// (Ring-1T, arXiv:2510.18855; INTELLECT-3, arXiv:2512.16144, eq. 1).
{ trainer+: { objective+: { importance_cap: null, importance_band: [0.5, 5.0] } } }
