// Before anything is painted: the theme that was chosen here last.
(() => {
  const chosen = localStorage.getItem('theme');
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
