// Before the first paint, so that nothing flashes: the theme chosen on this page, if any.
try {
  const theme = localStorage.getItem("ditmesh.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Storage is forbidden: the system's theme.
}
