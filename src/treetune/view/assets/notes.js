// The user's note on an answer: saved without a reload; typed text stays until it is saved.
'use strict';
(() => {
  const WAIT_MS = 20000;
  const own = () => document.getElementById('own-note');
  const fields = (form) => String(new URLSearchParams(new FormData(form)));
  let saving = false, again = false;

  async function save(form, openNext = false) {
    if (saving) { again = true; return; }
    saving = true;
    again = false;
    const sent = fields(form);
    try {
      const answer = await fetch(form.action, { method: 'POST', body: new URLSearchParams(sent), signal: AbortSignal.timeout(WAIT_MS) });
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const made = page.getElementById('notes');
      if (!made) throw new Error(`Not saved: ${page.querySelector('main .problem')?.textContent || page.body.textContent.trim()}`);
      if (fields(form) === sent || !made.querySelector('.own-note')) {
        again = false;
        document.getElementById('notes').replaceWith(document.adoptNode(made));
        if (openNext && document.querySelector('[data-on]')) document.querySelector('[data-key=j]')?.click();
      } else {  // the form was changed in the meantime: keep it
        for (const name of ['seen', 'about']) form.elements[name].value = made.querySelector(`[name=${name}]`).value;
        if (!answer.ok) throw new Error(made.querySelector('.problem').textContent);
      }
    } catch (error) {
      again = false;
      problem(error instanceof TypeError || error.name === 'TimeoutError' ? `Not saved: ${error.message}` : error.message);
    } finally { saving = false; }
    if (again) await save(form, openNext);
  }
  function problem(text) {
    let alert = own().querySelector('.problem');
    if (!alert) { alert = document.createElement('p'); alert.className = 'problem'; alert.setAttribute('role', 'alert'); own().prepend(alert); }
    alert.textContent = text;
  }

  document.addEventListener('input', (event) => {
    const form = event.target.closest('.own-note');
    if (!form) return;
    own().dataset.kept = '';
    if (event.target.matches('[type=checkbox]')) save(form, event.target.checked);
  });
  document.addEventListener('submit', (event) => {
    if (!event.target.matches('.own-note')) return;
    event.preventDefault();
    save(event.target);
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && event.target.matches('.own-note textarea')) save(event.target.form);
  });
  addEventListener('beforeunload', (event) => { if (own() && 'kept' in own().dataset) event.preventDefault(); });
})();
